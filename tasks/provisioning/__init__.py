"""Are servers up, with MTP really on, inside the memory they have?"""
