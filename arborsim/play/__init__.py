"""One recorded search under one policy: controller, rules, meters, episode player."""
