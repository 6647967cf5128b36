// kvtether
