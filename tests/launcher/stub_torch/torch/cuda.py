def is_initialized() -> bool:
    return False
