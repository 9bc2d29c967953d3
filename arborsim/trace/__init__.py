"""Traces: one Parquet file that holds recorded searches, readable by any Parquet tool."""
