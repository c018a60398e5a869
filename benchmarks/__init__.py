"""What is measured, each beside other software or its limit."""
