"""Tables, figures and pages that all products share."""
