"""What each adapter needs of its harness: tests that the harness's own interpreter runs before a proxy."""
