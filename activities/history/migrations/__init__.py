"""How the tables of each release are made from those of the release before."""
