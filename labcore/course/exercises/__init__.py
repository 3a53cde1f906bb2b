"""The exercises of each notebook: one module `nbNN` with a tuple `EXERCISES`. See `labcore.course.learner.exercise`."""
