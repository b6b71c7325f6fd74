"""What an answer must look like: from schemas, patterns and tools to token masks."""
