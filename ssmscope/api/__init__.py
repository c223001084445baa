"""Declaration, inputs, options and results of analyses, shared by Python code, the command line and plans."""
