"""An on-call day: what a cluster and its administrators do to a job, one event after another.

Unlike `benchmarks.kubernetes`, which times repairs, it judges what a person on call needs: the job trains again or
waits for a stated reason, `perdure explain` and `kubectl describe` tell what happened, and nothing stays behind.
"""
