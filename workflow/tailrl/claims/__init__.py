"""What the papers claim, and the verdict of a study's results on each."""
