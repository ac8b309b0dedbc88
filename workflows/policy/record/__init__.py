"""What users read of a job: incidents, observations, events and views, all made from its state."""
