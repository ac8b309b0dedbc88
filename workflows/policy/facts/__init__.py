"""What each event makes known: these modules change the state and decide nothing."""
