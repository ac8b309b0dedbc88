"""Random, overlapping faults on programs that know nothing of Perdure: do they end with the right results?"""
