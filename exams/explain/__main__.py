"""`python -m exams.explain`. The exam is a module of its own: the processes that it starts find it by its name."""

from exams.explain.exam import main

main()
