"""What failed, why, and who caused it: classes of failures, suspects, and reports that a node may not make."""
