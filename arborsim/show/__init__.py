"""From measurements to tables, figures and a one-file HTML report."""
