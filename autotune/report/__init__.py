"""What runs have left: run directories → pandas, and several runs side by side. No measuring here."""
