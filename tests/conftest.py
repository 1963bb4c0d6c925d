"""Settings of all tests."""

import hypothesis

# Tests share a machine with engines and other suites: the time of one example says nothing about the code.
hypothesis.settings.register_profile("mempo", deadline=None)
hypothesis.settings.load_profile("mempo")
