"""What a person sees: metrics, run folder, progress, report."""
