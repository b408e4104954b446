"""Every arm's gradient estimator against the exact gradient of the return, on models small enough to enumerate."""
