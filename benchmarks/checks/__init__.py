"""What checks of machines and of steps cost a training."""
