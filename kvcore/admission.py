class Watermark:
    def __init__(self, blocks):
        self.blocks = blocks

    def reserve(self, request, view):
        return self.blocks

    def ended(self, request, n_generated):
        pass
