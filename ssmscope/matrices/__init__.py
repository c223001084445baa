"""How the implicit attention matrices of linear recurrences are made; `ssmscope.ssm` chooses among them."""
