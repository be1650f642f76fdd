package discover

import (
	"context"
	"sync"

	"github.com/moby/moby/client"
	"golang.org/x/sync/singleflight"
)

// maxImages limits the remembered labels of images, in bytes.
const maxImages = 16 << 20

// labelsOfImage are the labels of one image, for each platform that the container may be of. They
// are shared: do not change them.
type labelsOfImage []map[string]string

// labelsOfImages caches the labels of an engine's images by their ids, which stand for the content.
// The zero value is ready to use.
type labelsOfImages struct {
	asked singleflight.Group

	mu    sync.Mutex
	known map[string]labelsOfImage
	bytes int
}

// of returns the labels of the image of a container. If an engine keeps its images in containerd,
// an image covers all platforms, and the engine describes the host's own; then it also names the
// manifest of the container.
//
// Errors: errImage if the engine does not know; errAnswer.
func (l *labelsOfImages) of(ctx context.Context, c *client.Client, of client.ContainerInspectResult) (labelsOfImage, error) {
	ct := of.Container
	key, from := ct.Image, ct.ImageManifestDescriptor
	if from != nil {
		key += " " + from.Digest.String()
	}
	// Of many containers that start at a time, one asks.
	v, err, _ := l.asked.Do(key, func() (any, error) {
		l.mu.Lock()
		got, ok := l.known[key]
		l.mu.Unlock()
		if ok {
			return got, nil
		}
		image, err := c.ImageInspect(ctx, ct.Image)
		if err != nil {
			return nil, err
		}
		var all labelsOfImage
		if image.Config != nil {
			all = append(all, image.Config.Labels)
		}
		if from != nil && from.Platform != nil {
			p := from.Platform
			if p.OS != image.Os || p.Architecture != image.Architecture || p.Variant != image.Variant {
				if c.ClientVersion() == "1.48" { // the first with manifests, but without a way to ask
					return nil, errImage
				}
				if image, err = c.ImageInspect(ctx, ct.Image, client.ImageInspectWithPlatform(p)); err != nil {
					return nil, err
				}
				if image.Config != nil {
					all = append(all, image.Config.Labels)
				}
			}
		}
		l.keep(key, all)
		return all, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(labelsOfImage), nil
}

// keep caches labels, and drops all others once they take too much.
func (l *labelsOfImages) keep(key string, labels labelsOfImage) {
	size := len(key)
	for _, m := range labels {
		for k, v := range m {
			size += len(k) + len(v)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bytes += size; l.known == nil || l.bytes > maxImages {
		l.known, l.bytes = make(map[string]labelsOfImage), size
	}
	l.known[key] = labels
}
