"""What each metric means, and its names in other frameworks."""
