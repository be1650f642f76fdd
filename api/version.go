package api

// Release is the version of fairlead that this package is part of: the one place that states it. A
// build of a commit that is not tagged with it adds a suffix; see Version.Version.
const Release = "0.1.0"
