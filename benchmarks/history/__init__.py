"""What jobs cost in history, and whether groups lose anything at the end of one."""
