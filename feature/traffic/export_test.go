package traffic

// Paths gives how packets at uplinks were told apart.
func (f *Traffic) Paths() (map[string]uint64, error) { return f.programs.paths() }

// Inpaths gives how packets received at uplinks were told apart.
func (f *Traffic) Inpaths() (map[string]uint64, error) { return f.programs.inpaths() }
