"""Generated puzzles: Sudoku, mazes, the 24 game, Knights and Knaves. Every answer is verified against the rules."""
