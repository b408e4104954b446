"""What studies show, a folder a question: its numbers, its verdicts' endpoints, its page and its template."""
