"""Files that ship with the package. `multiwoz-01.json` is the conversation that `compare` reads when none is given;
its licence is `LICENSE-MultiWOZ.txt`."""
