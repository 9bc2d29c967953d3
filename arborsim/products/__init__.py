"""Products: a folder per question, with what is asked, how it runs, its results and its report."""
