"""rollkeel's objectives, measurements and traces inside other trainers: one file each. The trainer is an optional
dependency."""
