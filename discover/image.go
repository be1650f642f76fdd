package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	content "github.com/containerd/containerd/api/services/content/v1"
	images "github.com/containerd/containerd/api/services/images/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Bounds of an image's data, which is untrusted.
const (
	maxBlob  = 4 << 20 // bytes of an index, a manifest or a configuration
	maxBlobs = 64      // of one image
)

// errImage means that an image's labels are unknown: it was removed, or exceeds the bounds.
var errImage = errors.New("labels of the image are unknown")

// blob is the part that is used of an OCI or Docker image. An index has Manifests, a manifest has
// the digest of a configuration, and a configuration has labels.
type blob struct {
	Manifests []struct{ Digest string }
	Config    struct {
		Digest string
		Labels map[string]string
	}
}

// imageLabels returns the labels of an image in containerd, one map for each platform with a
// configuration. Errors: errImage.
func (c cri) imageLabels(ctx context.Context, name string) (labels []map[string]string, err error) {
	image, err := c.images.Get(ctx, &images.GetImageRequest{Name: name})
	if status.Code(err) == codes.NotFound {
		return nil, errImage
	}
	if err != nil {
		return nil, err
	}
	digests := []string{image.GetImage().GetTarget().GetDigest()}
	for i := 0; i < len(digests); i++ {
		if i == maxBlobs {
			return nil, errImage
		}
		b, err := c.blob(ctx, digests[i])
		if status.Code(err) == codes.NotFound {
			continue // of a platform that was not pulled
		}
		if err != nil {
			return nil, err
		}
		for _, m := range b.Manifests {
			digests = append(digests, m.Digest)
		}
		if b.Config.Digest != "" {
			digests = append(digests, b.Config.Digest)
		}
		if len(b.Config.Labels) > 0 {
			labels = append(labels, b.Config.Labels)
		}
	}
	return labels, nil
}

func (c cri) blob(ctx context.Context, digest string) (b blob, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	stream, err := c.content.Read(ctx, &content.ReadContentRequest{Digest: digest})
	if err != nil {
		return b, err
	}
	var data []byte
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return b, err
		}
		if data = append(data, part.GetData()...); len(data) > maxBlob {
			return b, fmt.Errorf("%w: blob %q is longer than %d bytes", errImage, digest, maxBlob)
		}
	}
	return parseBlob(data)
}

func parseBlob(data []byte) (b blob, err error) {
	if json.Unmarshal(data, &b) != nil {
		return blob{}, errImage
	}
	return b, nil
}
