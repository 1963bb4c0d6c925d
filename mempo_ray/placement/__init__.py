"""Which role runs where: computed, printed, then reserved."""
