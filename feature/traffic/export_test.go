package traffic

// Paths gives how packets at uplinks were told apart.
func (f *Traffic) Paths() (map[string]uint64, error) { return f.programs.paths() }
