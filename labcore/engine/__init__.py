"""The engine: schedule, run, update; and what a request becomes while it is served."""
