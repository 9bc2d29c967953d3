"""The functions that `arborsim` exports, and the results they return.

A file each: what is asked for is checked and built here, by the same code for the command line and
for Python, and handed to the packages below.
"""
