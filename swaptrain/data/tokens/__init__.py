"""Token ids on the disk: arrays written once, files of others, and what is cut from them."""
