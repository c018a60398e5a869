"""What each public model family needs to be loaded; imports no torch."""
