"""What was held out of the committed calibrations, predicted and written up: the rooms of the validation page."""
