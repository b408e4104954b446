"""The files that a run leaves behind: the only readers and writers of each."""
