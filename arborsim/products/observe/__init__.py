"""`arborsim observe`: what a served model takes, as a log and as an engine fitted to it."""
