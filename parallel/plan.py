"""placeholder; see the helper that owns it"""
