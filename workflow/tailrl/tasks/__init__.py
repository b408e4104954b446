"""Tasks: problems with answers that can be checked. `registry` knows them all, `scoring` scores a response."""
