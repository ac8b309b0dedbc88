"""What `import torch` loads in every rank: counts steps, and reports how far the rank is."""
