"""One recorded search under one policy: the controller, its rules and meters, and replays."""
