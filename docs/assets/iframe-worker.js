// Search runs in a worker, which browsers refuse to pages that are opened from the disk. There, and only there,
// a hidden frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
      this.ready = new Promise((done) => {
        inner.document.open();
        inner.document.write(
          `<script>
             postMessage = (data) => parent.postMessage(data, "*");
             importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((loaded) => {
               const script = document.createElement("script");
               script.src = url;
               script.onload = loaded;
               document.body.append(script);
             })), Promise.resolve());
           </scr` + `ipt><body></body><script src="${url}"></scr` + `ipt>`
        );
        inner.document.close();
        inner.addEventListener("load", done);
      });
    }
    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
