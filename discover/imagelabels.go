package discover

import (
	"context"
	"sync"

	"github.com/moby/moby/client"
	"golang.org/x/sync/singleflight"
)

// maxImages limits the remembered labels of images, in bytes.
const maxImages = 16 << 20

// labelsOfImage are the labels of one image, one map for each platform that the container may have.
// The maps are shared: do not change them.
type labelsOfImage []map[string]string

// labelsOfImages caches the labels of an engine's images by id, which identifies the content. The
// zero value is ready to use.
type labelsOfImages struct {
	asked singleflight.Group

	mu    sync.Mutex
	known map[string]labelsOfImage
	bytes int
}

// of returns the labels of the image of a container. If an engine keeps its images in containerd,
// an image covers all platforms. The engine then describes the host's platform, and names the
// manifest of the container as well.
//
// Errors: errImage if the engine does not know the image; errAnswer.
func (l *labelsOfImages) of(ctx context.Context, c *client.Client, of client.ContainerInspectResult) (labelsOfImage, error) {
	ct := of.Container
	key, from := ct.Image, ct.ImageManifestDescriptor
	if from != nil {
		key += " " + from.Digest.String()
	}
	// If many containers start at the same time, one query serves all.
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
				if c.ClientVersion() == "1.48" { // the first version with manifests, but it cannot be asked for one
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

// keep caches labels. It drops all others once they exceed maxImages.
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
