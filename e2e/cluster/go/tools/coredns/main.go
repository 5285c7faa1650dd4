// CoreDNS with the plugins of the tests' Corefile only. The stock command also contains the SDKs of three clouds.
package main

import (
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/kubernetes"

	"github.com/coredns/coredns/coremain"
)

func main() { coremain.Run() }
