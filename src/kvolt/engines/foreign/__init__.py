"""What adapters of other people's engines share. Adapters are small: requests in its words, answers in ours."""
