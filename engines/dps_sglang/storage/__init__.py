"""A page store in a directory that many engines share: checked pages, one size limit, no torch and no SGLang."""
