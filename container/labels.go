package container

// The labels by which the kubelet tells every runtime what a container is.
const (
	podLabel       = "io.kubernetes.pod.name"
	namespaceLabel = "io.kubernetes.pod.namespace"
	nameLabel      = "io.kubernetes.container.name"
)
